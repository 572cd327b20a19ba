"""`python -m posthoc`."""

from posthoc.cli import main

if __name__ == "__main__":
    main()
