/** Threads that take from one stock by turns, so that each of them waits for the others. */
public class Contend {
    static class Stock {
        synchronized void take() throws InterruptedException {
            Thread.sleep(5);
        }
    }

    public static void main(String[] arguments) {
        Stock stock = new Stock();
        for (int buyers = 0; buyers < 3; buyers++)
            new Thread(() -> {
                try {
                    for (int turn = 0; turn < 4; turn++)
                        stock.take();
                } catch (InterruptedException e) {
                    throw new IllegalStateException(e);
                }
            }).start();
    }
}
