"""System metrics: what a run takes of its host and devices while it trains, as series."""
