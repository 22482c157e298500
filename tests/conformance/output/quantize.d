/* Bins with one empty one at each end; by the sum of the values. Counts can be negative. */
#pragma D option quiet

BEGIN
{
	@["rounded"] = quantize(1, 1);
	@["rounded"] = quantize(4, 79);
	@["negative values"] = quantize(-1);
	@["negative values"] = quantize(-3);
	@["negative values"] = quantize(-4);
	@["negative values"] = quantize(0);
	@["negative counts"] = quantize(2, -5);
	@["both"] = quantize(1, -10);
	@["both"] = quantize(8, 30);
	@["none"] = quantize(3, 2);
	@["none"] = quantize(3, -2);
	exit(0);
}
