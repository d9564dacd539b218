"""What a run would do, computed in this process: no rank is started. No torch until it is needed."""
