"""Runs the benchmark `layout_step` with glibc's defaults and with `machine.keep_freed`.

    python benchmarks/host_memory.py --out host_memory.json
"""

import os

import timing

# `machine.keep_freed` does nothing unless GLIBC_TUNABLES is empty.
_SETTINGS = {"default": "glibc.malloc.hugetlb=0", "kept": ""}


def main() -> None:
  args = timing.parser(__doc__, repeats=7).parse_args()
  figures = {}
  for name, setting in _SETTINGS.items():
    os.environ["GLIBC_TUNABLES"] = setting
    row = timing.in_subprocess("comparison.py", "layout_step", "--repeats", str(args.repeats))
    figures |= {f"{key}_{name}": row[key]
                for key in ("plain_s", "ours_s", "plain_peak_mib", "ours_peak_mib")}
  timing.report(figures, args.out)


if __name__ == "__main__":
  main()
