"""The world model: local states of each agent, joint prediction of what they will observe."""
