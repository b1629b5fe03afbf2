"""Mathematics problems, and a verifier that compares answers with accepted ones."""
