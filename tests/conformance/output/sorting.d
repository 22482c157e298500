/* By the second part of the key, the greatest first. Integers are compared without their sign. */
#pragma D option quiet
#pragma D option aggsortkey
#pragma D option aggsortrev
#pragma D option aggsortkeypos=1

BEGIN
{
	@first["oak", 3] = sum(1);
	@first["elm", 3] = sum(2);
	@first["ash", -3] = sum(3);
	@first["fir", 0] = sum(4);
	@second["yew", 1] = count();
	printa("%s %d %@d\n", @first);
	printa(@first);
	@third["zelkova", 9] = count();
	exit(0);
}
