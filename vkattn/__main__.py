"""`python -m vkattn`: the same as the command `vkattn`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
