"""Vision: the tower that encodes images, and where its features belong among a prompt's tokens."""
