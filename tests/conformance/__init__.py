"""What an implementation must do, as classes of cases with abstract fixtures."""
