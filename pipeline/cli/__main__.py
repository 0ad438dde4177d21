"""`python -m pipeline.cli`: the same as `duetasks`, for a process that has to start another one like itself."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
