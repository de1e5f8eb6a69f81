"""A page that plays a recorded battle in a browser and lets one look into it."""
