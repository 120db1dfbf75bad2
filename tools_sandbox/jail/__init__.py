"""What builds a jail or runs in it; its files import each other by bare names."""
