"""`report`: runs and sweeps drawn as one HTML page that needs nothing beside it, with PNGs and CSV for whoever wants them."""
