"""Lightning modules, data modules and the entry scripts of the trainings. Nothing imports this."""
