"""What a step would take on other hardware: the engine's own schedule, recorded without memory and replayed."""
