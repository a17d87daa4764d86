"""What ran with what: engines that tests start, as a page of models and features."""
