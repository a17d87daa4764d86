"""What a running server does besides answering: it writes records when asked, and ends whole."""
