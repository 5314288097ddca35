"""Floor 5: slots, staleness, ledger and the run loop. Ray lives in `actors`; everything else is plain asyncio."""
