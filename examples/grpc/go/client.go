// Streams one answer: client ADDRESS PROMPT [CA_FILE]
// The API key comes from ALLSPAN_API_KEY, the deadline from ALLSPAN_DEADLINE_S (60).
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	pb "example/inferencepb"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func connect(address string, args []string) (*grpc.ClientConn, error) {
	if len(args) == 0 {
		return grpc.Dial(address, grpc.WithInsecure())
	}
	trusted, err := credentials.NewClientTLSFromFile(args[0], "")
	if err != nil {
		return nil, err
	}
	return grpc.Dial(address, grpc.WithTransportCredentials(trusted))
}

func run(args []string) error {
	connection, err := connect(args[0], args[2:])
	if err != nil {
		return err
	}
	defer connection.Close()
	seconds, err := strconv.ParseFloat(os.Getenv("ALLSPAN_DEADLINE_S"), 64)
	if err != nil {
		seconds = 60
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(seconds*float64(time.Second)))
	defer cancel()
	if key := os.Getenv("ALLSPAN_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	maxTokens, temperature := uint32(100), 0.0
	stream, err := pb.NewInferenceClient(connection).Generate(ctx, &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: args[1]},
		Sampling: &pb.SamplingOptions{MaxTokens: &maxTokens, Temperature: &temperature},
	})
	for err == nil {
		var response *pb.GenerateResponse
		if response, err = stream.Recv(); err == nil {
			fmt.Print(response.Text)
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

func complain(err error) {
	failed := status.Convert(err)
	fmt.Fprintf(os.Stderr, "%s: %s\n", name(failed.Code()), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Fprintf(os.Stderr, "  field %s\n", violation.Field)
			}
		case *errdetails.RetryInfo:
			fmt.Fprintf(os.Stderr, "  try again in %d s\n", detail.RetryDelay.Seconds)
		}
	}
}

// name writes InvalidArgument as other languages do.
func name(code codes.Code) string {
	var words strings.Builder
	for at, letter := range code.String() {
		if at > 0 && letter >= 'A' && letter <= 'Z' {
			words.WriteByte('_')
		}
		words.WriteRune(letter)
	}
	return strings.ToUpper(words.String())
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		complain(err)
		os.Exit(1)
	}
}
