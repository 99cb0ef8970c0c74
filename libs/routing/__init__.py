"""Where a request goes: pure choices over plain state. The router and the simulator run the same."""
