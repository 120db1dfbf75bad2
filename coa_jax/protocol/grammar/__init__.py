"""Which texts a variant allows, as automata over bytes and over tokens."""
