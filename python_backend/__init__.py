"""From a request to tokens: scheduling, paging, bounded replay, execution, text."""
