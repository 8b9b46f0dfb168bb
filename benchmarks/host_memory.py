"""What the settings of host memory change for the training step of `layout_step.py`.

    python benchmarks/host_memory.py --out host_memory.json

By default, with huge pages, and with freed memory kept as well.
"""

import os

import timing
from tpugraphs_jax import host_memory

_SETTINGS = {
    "default": "glibc.malloc.hugetlb=0",
    "huge_pages": host_memory.HUGE_PAGES,
    "kept": f"{host_memory.HUGE_PAGES}:{host_memory.KEPT}",
}


def main() -> None:
  args = timing.parser(__doc__, repeats=7).parse_args()
  figures = {}
  for name, setting in _SETTINGS.items():
    os.environ[host_memory.VARIABLE] = setting
    row = timing.in_subprocess("layout_step.py", "--repeats", str(args.repeats))
    figures |= {f"{key}_{name}": row[key]
                for key in ("plain_s", "ours_s", "plain_peak_mib", "ours_peak_mib")}
  timing.report(figures, args.out)


if __name__ == "__main__":
  main()
