"""What makes a folder of notebooks a workbook: parameters, run folders, the runner, the report, what cells show."""
