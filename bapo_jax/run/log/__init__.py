"""The output of a run while it trains: metrics, tables, progress, and the sinks that receive the metrics."""
