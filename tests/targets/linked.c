/* A program that calls library.c, which it is linked with, three times, and ends. */
void library_call(int number);

int main(void)
{
	for (int number = 0; number < 3; number++)
		library_call(number);
	return 0;
}
