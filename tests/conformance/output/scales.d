/* The bins of lquantize() and llquantize(): what is below, above, and around 0. */
#pragma D option quiet

BEGIN
{
	@ages = lquantize(5, 10, 32, 5);
	@ages = lquantize(10, 10, 32, 5);
	@ages = lquantize(31, 10, 32, 5);
	@inside = lquantize(17, 10, 32, 5);
	@signed = lquantize(-7, -10, 10, 10);
	@latencies = llquantize(3, 10, 0, 2, 20);
	@latencies = llquantize(17, 10, 0, 2, 20);
	@latencies = llquantize(21, 10, 0, 2, 20);
	@beyond = llquantize(-500, 10, 1, 1, 5);
	@beyond = llquantize(9, 10, 1, 1, 5);
	@beyond = llquantize(100, 10, 1, 1, 5);
	@below = llquantize(50, 10, 2, 3, 10);
	@below = llquantize(130, 10, 2, 3, 10, 3);
	exit(0);
}
