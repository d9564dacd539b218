"""The flight recorder: what each rank did last, readable from outside when it can no longer say so. No torch here."""

from recipes.flight.recorder import NO_FLIGHT, FlightRecorder, NoFlight, RingRecorder, open_recorder

__all__ = ["NO_FLIGHT", "FlightRecorder", "NoFlight", "RingRecorder", "open_recorder"]
