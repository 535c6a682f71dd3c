"""What several phases and passes ask of an fx graph, and the calls that passes put into one."""
