"""What `duetasks bench` measures, and how; `bench/README.md` says what each figure means."""
