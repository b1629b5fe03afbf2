"""Code of a user, which a config field names: found, tried and identified before a run starts."""
