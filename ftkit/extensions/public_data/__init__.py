"""Published data sets by name, as in LitGPT: Alpaca, Deita, FLAN, LIMA, LongForm."""
