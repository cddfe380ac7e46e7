"""Carries transfers out: schedules, the pipeline of tiles, checksums, and sinks."""
