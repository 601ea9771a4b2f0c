"""What every engine adapter needs: what to load, what to store, when; no engine is named here."""
