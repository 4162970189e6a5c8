"""`python -m tests`: lint, types, tests; what CI runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pytest", *sys.argv[1:]),
)


def main() -> int:
    failed = [step for step in STEPS if subprocess.run([sys.executable, "-m", *step], cwd=ROOT).returncode]
    for step in failed:
        print("failed:", *step, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
