"""`python -m exssnet`."""

from exssnet.cli import main

if __name__ == "__main__":
    main()
