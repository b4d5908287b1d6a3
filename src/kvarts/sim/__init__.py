"""Virtual time: replay of traffic through the engine, with leaps over identical steps."""
