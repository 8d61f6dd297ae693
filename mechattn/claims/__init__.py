"""Published claims, tested on a model by rules fixed beforehand."""
