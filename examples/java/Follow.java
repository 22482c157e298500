import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import org.stapsdtd.v1.Account;
import org.stapsdtd.v1.Description;
import org.stapsdtd.v1.Event;
import org.stapsdtd.v1.Site;
import org.stapsdtd.v1.StapsdtServiceGrpc;
import org.stapsdtd.v1.StapsdtServiceGrpc.StapsdtServiceBlockingStub;
import org.stapsdtd.v1.StreamRequest;
import org.stapsdtd.v1.StreamResponse;
import org.stapsdtd.v1.SubscribeRequest;
import org.stapsdtd.v1.UnsubscribeRequest;
import org.stapsdtd.v1.Value;

/**
 * Prints the events of probes, then what became of all that fired.
 *
 * <pre>
 *   java Follow localhost:50051 COUNT SELECTOR...
 *   4711  postgresql:query__start  BEGIN;
 *   fired 3, delivered 3, filtered 0
 * </pre>
 */
public final class Follow {
    private final StapsdtServiceBlockingStub service;
    private final Map<Integer, String> sites = new HashMap<>();

    private Follow(StapsdtServiceBlockingStub service) {
        this.service = service;
    }

    public static void main(String[] arguments) {
        ManagedChannel channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
        List<String> selectors = Arrays.asList(arguments).subList(2, arguments.length);
        try {
            new Follow(StapsdtServiceGrpc.newBlockingStub(channel)).run(Integer.parseInt(arguments[1]), selectors);
        } catch (StatusRuntimeException error) {
            System.err.println(error.getStatus().getDescription());
            System.exit(1);
        } finally {
            channel.shutdownNow();
        }
    }

    private void run(int count, List<String> selectors) {
        // armed when this returns
        SubscribeRequest request = SubscribeRequest.newBuilder().addAllSelectors(selectors).build();
        String id = service.subscribe(request).getSubscriptionId();
        Iterator<StreamResponse> responses = service.stream(
            StreamRequest.newBuilder().setSubscriptionId(id).setEncoding(StreamRequest.Encoding.ENCODING_ROWS).build());
        int left = count;
        while (responses.hasNext()) {
            StreamResponse response = responses.next();
            switch (response.getPayloadCase()) {
                case DESCRIPTIONS: // of a site, before its first event
                    response.getDescriptions().getProbesList().forEach(this::remember);
                    break;
                case ROWS:
                    response.getRows().getEventsList().forEach(this::print);
                    boolean wereTooFew = left > 0;
                    left -= response.getRows().getEventsCount();
                    if (wereTooFew && left <= 0) {
                        // the stream goes on with what fired until then, and closes with an End
                        service.unsubscribe(UnsubscribeRequest.newBuilder().setSubscriptionId(id).build());
                    }
                    break;
                case LOSS:
                    System.err.println(response.getLoss().getCount() + " events lost: " + response.getLoss().getStage());
                    break;
                case END:
                    print(response.getEnd().getAccount());
                    break;
                default:
                    break;
            }
        }
    }

    private void remember(Description description) {
        String name = description.getProbe().getProvider() + ":" + description.getProbe().getName();
        for (Site site : description.getProbe().getSitesList()) {
            sites.put(site.getSiteId(), name);
        }
    }

    private void print(Event event) {
        StringJoiner line = new StringJoiner("  ");
        line.add(Integer.toString(event.getPid())).add(sites.get(event.getSiteId()));
        event.getValuesList().forEach(value -> line.add(text(value)));
        System.out.println(line);
    }

    private static void print(Account account) {
        System.out.printf("fired %s, delivered %s, filtered %s%n",
            Long.toUnsignedString(account.getFired()),
            Long.toUnsignedString(account.getDelivered()),
            Long.toUnsignedString(account.getFiltered()));
    }

    private static String text(Value value) {
        switch (value.getKindCase()) {
            case SIGNED:
                return Long.toString(value.getSigned());
            case UNSIGNED:
                // Java has no type of its own for it
                return Long.toUnsignedString(value.getUnsigned());
            case FLOAT:
                return Double.toString(value.getFloat());
            case STRING:
                return value.getString().toStringUtf8();
            case RAW:
                return value.getRaw().toStringUtf8();
            default:
                return value.getUnavailable();
        }
    }
}
