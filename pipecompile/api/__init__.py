"""Where the phases are composed, and nowhere else. `planning` needs no torch; the rest does."""
