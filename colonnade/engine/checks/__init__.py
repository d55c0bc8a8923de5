"""What would train wrongly without a word: said when an engine is built (`start_up`, `advice`), or while it runs."""
