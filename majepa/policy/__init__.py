"""What turns predicted or real outcomes into better actions: returns, actor, critic."""
