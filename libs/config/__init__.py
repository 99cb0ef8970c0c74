"""Settings: defaults < TOML file < environment < flags, frozen once read."""
