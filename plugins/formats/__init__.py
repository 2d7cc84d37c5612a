"""Number formats and cache-row layouts: the only place that knows a byte's meaning."""
