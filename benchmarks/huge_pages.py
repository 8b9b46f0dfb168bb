"""What huge memory pages change for the training step of `layout_step.py`.

    python benchmarks/huge_pages.py --out huge_pages.json
"""

import os

import timing
from tpugraphs_jax import huge_pages


def main() -> None:
  args = timing.parser(__doc__, repeats=7).parse_args()
  figures = {}
  for name, setting in (("without", "glibc.malloc.hugetlb=0"), ("with", huge_pages.SETTING)):
    os.environ[huge_pages.VARIABLE] = setting
    row = timing.in_subprocess("layout_step.py", "--repeats", str(args.repeats))
    figures |= {f"{key}_{name}": row[key]
                for key in ("plain_s", "ours_s", "plain_peak_mib", "ours_peak_mib")}
  timing.report(figures, args.out)


if __name__ == "__main__":
  main()
