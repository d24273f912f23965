"""The parts of `libdsec.bus`; nothing outside that module imports them."""
