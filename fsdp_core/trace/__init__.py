"""What the engine did, in the order it did it, and whether that order was right."""

from fsdp_core.trace.events import Event, EventLog, FlightRecorder

__all__ = ["Event", "EventLog", "FlightRecorder"]
