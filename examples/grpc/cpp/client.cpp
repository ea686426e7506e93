// Streams one answer: client ADDRESS PROMPT [CA_FILE]
// The API key comes from ALLSPAN_API_KEY, the deadline from ALLSPAN_DEADLINE_S (60).
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "details.pb.h"
#include "inference.grpc.pb.h"

namespace pb = allspan::v1;

std::shared_ptr<grpc::Channel> connect(const std::string& address, const char* ca_file) {
  if (ca_file == nullptr) return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  std::ifstream file(ca_file);
  grpc::SslCredentialsOptions options;
  options.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
  return grpc::CreateChannel(address, grpc::SslCredentials(options));
}

const char* name(grpc::StatusCode code) {
  static const char* const names[] = {"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
                                      "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
                                      "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
                                      "UNAUTHENTICATED"};
  return names[code];
}

void complain(const grpc::Status& failed) {
  std::cerr << name(failed.error_code()) << ": " << failed.error_message() << "\n";
  google::rpc::Status status;
  status.ParseFromString(failed.error_details());
  for (const auto& detail : status.details()) {
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&bad)) {
      for (const auto& violation : bad.field_violations()) std::cerr << "  field " << violation.field() << "\n";
    } else if (detail.UnpackTo(&retry)) {
      std::cerr << "  try again in " << retry.retry_delay().seconds() << " s\n";
    }
  }
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: client ADDRESS PROMPT [CA_FILE]\n";
    return 2;
  }
  const auto stub = pb::Inference::NewStub(connect(argv[1], argc > 3 ? argv[3] : nullptr));
  const char* seconds = std::getenv("ALLSPAN_DEADLINE_S");
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(static_cast<int>(1000 * (seconds ? std::atof(seconds) : 60))));
  if (const char* key = std::getenv("ALLSPAN_API_KEY")) context.AddMetadata("authorization", std::string("Bearer ") + key);

  pb::GenerateRequest request;
  request.set_text(argv[2]);
  request.mutable_sampling()->set_max_tokens(100);
  request.mutable_sampling()->set_temperature(0);
  const auto stream = stub->Generate(&context, request);
  for (pb::GenerateResponse response; stream->Read(&response);) std::cout << response.text() << std::flush;
  if (const grpc::Status status = stream->Finish(); !status.ok()) {
    complain(status);
    return 1;
  }
}
