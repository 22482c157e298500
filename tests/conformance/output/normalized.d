/* normalize() divides what is shown, clear() keeps the keys, trunc() removes them. */
#pragma D option quiet

BEGIN
{
	@total["a"] = sum(1999);
	@total["b"] = sum(-1999);
	@total["c"] = sum(5000);
	@sizes["a"] = quantize(1, 2500);
	normalize(@total, 1000);
	normalize(@sizes, 1000);
	printa("%s %@d\n", @total);
	printa(@sizes);
	trunc(@total, 2);
	denormalize(@total);
	printa(@total);
	trunc(@total, -1);
	clear(@total);
	clear(@sizes);
	printa(@total);
	printa(@sizes);
	trunc(@total);
	printa(@total);
	printf("end\n");
	exit(0);
}
