"""Is a timeline true? Shares no code with what records one."""
