"""Moving bytes: schedules, the pipeline of tiles, and where the bytes go."""
