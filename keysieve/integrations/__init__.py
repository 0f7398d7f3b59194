"""Ways into models and engines that keysieve did not write. Each module imports its framework's objects lazily."""
