"""The strategy of a job that was never compiled: meshes, rules, presets, and what they make."""
