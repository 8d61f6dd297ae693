"""Results on disk or at an address: written completely or not at all; nothing foreign touched,
nothing hostile read."""
